"""A reward model with a head for sequence classification: conversations to logits, in batches with a token limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from megagrpo.errors import ModelError, Problem, first_line
from megagrpo.recipe.schema import ClassifierConfig
from megagrpo.reward.judging.classifier import Conversation
from megagrpo.tokenizer import encode_conversation, load_chat_tokenizer


class Classifier:
    """A classification model in a Hugging Face directory, on one device. `labels` are the names of its logits.

    Its tokenizer's chat template renders the text, and alone writes special tokens. `one_by_one`: batches of one, whose
    logits have equal bits whatever else is scored. Raises ModelError if it is no such model, or has no chat template.
    """

    def __init__(
        self, directory: Path, config: ClassifierConfig, *, device: str, dtype: str, one_by_one: bool = False
    ) -> None:
        self._tokenizer = load_chat_tokenizer(directory, config.chat_template)
        try:
            model, info = AutoModelForSequenceClassification.from_pretrained(
                directory, dtype=getattr(torch, dtype), output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            needed = "a model that AutoModelForSequenceClassification loads"
            raise ModelError(Problem(f"reward model {directory}", first_line(error), needed)) from error
        if missing := sorted(info["missing_keys"]):
            given = f"no weights for {', '.join(missing[:3])}"
            raise ModelError(Problem(f"reward model {directory}", given, "a head for classification that is trained"))
        self._model, self._device = model.to(device).eval(), device
        self._tokens_per_batch, self._one_by_one = config.tokens_per_batch, one_by_one
        self._tokens_max = config.tokens_max or getattr(model.config, "max_position_embeddings", None)
        model.config.use_cache = False
        self._pad = model.config.get_text_config().pad_token_id
        self.labels = [model.config.id2label[number] for number in range(model.config.num_labels)]

    def logits(self, conversations: Sequence[Conversation]) -> list[list[float] | str]:
        """Returns the logits of each conversation, float32, or the reason why it has none."""
        logits: list[list[float] | str] = [""] * len(conversations)
        tokens: dict[int, list[int]] = {}
        for at, conversation in enumerate(conversations):
            try:
                ids = encode_conversation(self._tokenizer, conversation)
            except Exception as error:  # noqa: BLE001  (a template of the model's raises what it likes)
                logits[at] = f"its chat template refuses the conversation: {first_line(error)}"
                continue
            if self._tokens_max is not None and len(ids) > self._tokens_max:
                logits[at] = f"a conversation of {len(ids)} tokens, not of at most {self._tokens_max}"
            elif not ids:
                logits[at] = "a conversation of no tokens"
            else:
                tokens[at] = ids
        for batch in batches_of({at: len(ids) for at, ids in tokens.items()}, self._tokens_per_batch, self._one_by_one):
            for at, row in zip(batch, self._forward([tokens[at] for at in batch]), strict=True):
                logits[at] = row
        return logits

    @torch.inference_mode()
    def _forward(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Computes the logits of rows of token ids, padded on the right."""
        pad, config = self._pad, self._model.config.get_text_config()
        if pad is None and len(rows) > 1:  # the model reads the last token that is not this one: one that no row has
            used = {token for row in rows for token in row}
            pad = next((token for token in range(config.vocab_size) if token not in used), None)
            if pad is None:
                return [logits for row in rows for logits in self._forward([row])]
            config.pad_token_id = pad
        longest = max(map(len, rows))
        ids = torch.tensor([row + [pad or 0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        logits = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits
        config.pad_token_id = self._pad
        return list(logits.float().cpu().tolist())


def batches_of(lengths: Mapping[Any, int], tokens_max: int, one_by_one: bool = False) -> list[list[Any]]:
    """Splits keys into batches of at most `tokens_max` tokens with padding; similar lengths together, longest first."""
    batches: list[list[Any]] = []
    longest = 0
    for key in sorted(lengths, key=lambda key: -lengths[key]):
        if batches and not one_by_one and (len(batches[-1]) + 1) * longest <= tokens_max:
            batches[-1].append(key)
        else:
            batches.append([key])
            longest = lengths[key]
    return batches
