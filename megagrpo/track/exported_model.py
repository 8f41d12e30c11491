"""The code with which MLflow loads an exported model: the file is copied into each version, and needs no megagrpo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class ExportedModel(mlflow.pyfunc.PythonModel):
    """A model from text to text: each prompt is a user's message."""

    def load_context(self, context: Any) -> None:
        directory, step = Path(context.model_config["directory"]), context.model_config["step"]
        if step:
            newest = json.loads((directory / "megagrpo.json").read_text(encoding="utf-8"))["step"]
            if str(newest) != step:
                raise ValueError(f"this version is of step {step}; {directory} has the model of step {newest} by now")
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_pretrained(directory, device_map=None).eval()
        if torch.cuda.is_available():
            self._model.cuda()

    def predict(self, context: Any, model_input: Any, params: dict[str, Any] | None = None) -> list[str]:
        """Generates a response to each row of a table with the column `prompt`. A temperature of 0 is greedy."""
        settings = {"max_new_tokens": 256, "temperature": 0.0, **(params or {})}
        temperature = settings.pop("temperature")
        settings |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        answers = []
        for prompt in model_input["prompt"]:
            message = [{"role": "user", "content": prompt}]
            inputs = self._tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            inputs = {name: tensor.to(self._model.device) for name, tensor in inputs.items()}
            made = self._model.generate(**inputs, **settings)
            answers.append(self._tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        return answers


mlflow.models.set_model(ExportedModel())
