"""reward.models: models that score or judge, which the run starts."""

from __future__ import annotations

from typing import Annotated, Literal

from megagrpo.recipe.schema.rollout import SglangConfig
from megagrpo.section import ByName, Count, Section, Tokens

Device = Literal["auto", "cpu"]
DType = Literal["auto", "float32", "bfloat16"]


class ClassifierConfig(Section):
    """A reward model with a head for sequence classification, for the function reward_model."""

    kind: Literal["classifier"] = "classifier"
    """classifier: transformers' AutoModelForSequenceClassification, in a process of its own."""

    path: str
    """Hugging Face directory or hub id, with the model's own tokenizer."""

    device: Device = "auto"
    """auto: one device of its own, of the kind that training has. cpu: the processors of a node, beside GPUs too."""

    dtype: DType = "auto"
    """Type of weights and activations. auto: bfloat16 on GPUs, float32 on CPUs."""

    chat_template: str | None = None
    """Jinja file that turns the conversation into text. null: the tokenizer's own."""

    tokens_per_batch: Tokens = 16384
    """Most tokens of a batch, padding included. A longer conversation is a batch by itself."""

    tokens_max: Tokens | None = None
    """Longest conversation; a longer one is an error of its response, which is masked. null: the model's
    max_position_embeddings."""

    @property
    def devices(self) -> int:
        """Returns the number of its own devices."""
        return 0 if self.device == "cpu" else 1


class GenerativeConfig(Section):
    """A model that writes verdicts, for judge, judge_pairs and judge_ranking: an SGLang server that the run starts."""

    kind: Literal["generative"] = "generative"
    """generative: an SGLang server, asked by judge and its like."""

    path: str
    """Hugging Face directory or hub id."""

    devices: Count = 1
    """Devices of its own, which share each matrix (SGLang's tp_size)."""

    dtype: DType = "auto"
    """Type of weights and activations. auto: bfloat16 on GPUs, float32 on CPUs."""

    requests_at_once: Count = 64
    """Answers that it decodes in one batch."""

    tokens_max: Tokens = 8192
    """Longest question with its answer."""

    sglang: SglangConfig = SglangConfig()
    """An interpreter with SGLang, and any server argument."""


RewardModelConfig = Annotated[ClassifierConfig | GenerativeConfig, ByName("kind")]
