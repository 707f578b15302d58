"""Configuration of a DSpark drafter, checked on construction.

First file of the data path; it imports none of the others. Per-call settings live in the target's `GenerationConfig`;
the `default_*` fields here are their fallbacks.
"""

import math
from itertools import pairwise
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import RopeParameters


MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
SCHEDULES = ("fixed", "confidence", "throughput", "throughput_lagged")
BACKBONE_TRAITS = ("hidden_act", "attention_scale", "attention_k_eq_v", "value_norm", "sandwich_norms", "layer_scalar")
# What all layers of Gemma 4 have; the activation and `attention_k_eq_v` are in its config.
GEMMA4_TRAITS = {"attention_scale": 1.0, "value_norm": True, "sandwich_norms": True, "layer_scalar": True}


@strict
class DSparkConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DSparkModel`]. Field names follow the public DSpark checkpoints (DeepSpec).

    Args:
        vocab_size (`int`, *optional*, defaults to `151936`):
            Vocabulary of the target, which the drafter shares.
        hidden_size (`int`, *optional*, defaults to `2560`):
            Hidden size of the drafter and of the target, whose embedding and LM head are borrowed.
        intermediate_size (`int`, *optional*, defaults to `9728`): Width of the feed-forward layers.
        num_hidden_layers (`int`, *optional*, defaults to `5`): Layers of the draft backbone.
        num_attention_heads (`int`, *optional*, defaults to `32`): Attention heads.
        num_key_value_heads (`int`, *optional*): Key/value heads; `None` means as many as attention heads.
        head_dim (`int`, *optional*): Size of a head; `None` means `hidden_size // num_attention_heads`.
        hidden_act (`str`, *optional*, defaults to `"silu"`): Activation of the feed-forward layers.
        max_position_embeddings (`int`, *optional*, defaults to `40960`): Longest sequence of the target.
        initializer_range (`float`, *optional*, defaults to `0.02`): Standard deviation of the initial weights.
        rms_norm_eps (`float`, *optional*, defaults to `1e-6`): Epsilon of the RMS norms.
        rope_parameters (`dict`, *optional*): Rotary embedding, as in Transformers (`rope_theta`, `rope_type`, ...).
        attention_bias (`bool`, *optional*, defaults to `False`): Whether the attention projections have a bias.
        attention_dropout (`float`, *optional*, defaults to `0.0`): Dropout of attention weights in training.
        attention_scale (`float`, *optional*):
            Factor of the attention scores; `None` means `head_dim ** -0.5`. Gemma 4 has 1.
        attention_k_eq_v (`bool`, *optional*, defaults to `False`):
            Whether values are the projected keys (before their norm and rotation), and there is no `v_proj`. Gemma 4.
        value_norm (`bool`, *optional*, defaults to `False`):
            Whether each head of the values has an RMS norm, without a learned scale. Gemma 4.
        sandwich_norms (`bool`, *optional*, defaults to `False`):
            Whether attention and feed-forward each have one norm before and one after them, applied before the residual
            is added (`pre_feedforward_layernorm`, `post_feedforward_layernorm`). `post_attention_layernorm` is then the norm
            after attention instead of the norm before the feed-forward. Gemma 4.
        layer_scalar (`bool`, *optional*, defaults to `False`):
            Whether a layer's output is multiplied by its buffer `layer_scalar` `[1]`, which is not trained. Gemma 4.
        block_size (`int`, *optional*, defaults to `7`):
            Draft tokens of one block (`gamma` in the paper).
        sample_from_anchor (`bool`, *optional*, defaults to `True`):
            Whether the first draft token comes from the anchor's own position, and each position predicts the token after
            it. `False` is DFlash's older layout: each position predicts the token at its own position, and the anchor's position predicts none.
        target_layer_ids (`list[int]`, *optional*, defaults to `[1, 9, 17, 25, 33]`):
            Tapped target layers, strictly increasing; id `i` is the output of layer `i` (`hidden_states[i + 1]`), `-1`
            the embedding output. The last layer cannot be tapped (Transformers returns it after the final norm).
        num_target_layers (`int`, *optional*, defaults to `36`):
            Layers of the target; `None` if a checkpoint of another format does not give them.
        mask_token_id (`int`, *optional*, defaults to `151669`): Token embedded at the positions after the anchor.
        markov_rank (`int`, *optional*, defaults to `256`): Rank of the sequential head; 0 means none (plain DFlash).
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`): `vanilla`, `gated` or `rnn`.
        enable_confidence_head (`bool`, *optional*, defaults to `True`): Whether there is a confidence head.
        confidence_head_with_markov (`bool`, *optional*, defaults to `True`):
            Whether the confidence head sees the Markov embedding of the previous token; needs `markov_rank > 0`.
        confidence_temperatures (`list[float]`, *optional*):
            Temperatures `T_k` of sequential temperature scaling, one per position: `c_k = sigmoid(z_k / T_k)`.
        draft_vocab_size (`int`, *optional*):
            Size of a reduced draft vocabulary; the buffer `d2t` maps it to the target's (`target = draft + d2t[draft]`).
            `None` means the whole vocabulary.
        default_num_assistant_tokens (`int`, *optional*): Default cap of drafted tokens; `None` means `block_size`.
        default_assistant_confidence_threshold (`float`, *optional*, defaults to `0.5`):
            Default threshold of the `confidence` schedule, on calibrated confidence.
        default_num_assistant_tokens_schedule (`str`, *optional*):
            Default schedule: `throughput`, `throughput_lagged`, `confidence` or `fixed`. `None` means `throughput`, or
            `fixed` without a confidence head.
        target_name_or_path (`str`, *optional*): The target that the drafter was trained for.
        chat_template_sha256 (`str`, *optional*):
            SHA-256 of the chat template in training; a different template in use lowers acceptance.
        pad_token_id, bos_token_id, eos_token_id (*optional*): The target's, so that pipelines see one tokenizer.

    Raises:
        ValueError: for any field or combination of fields that cannot make a drafter; the message names the field.

    Example:

    ```python
    >>> from modeling_dspark import DSparkConfig

    >>> config = DSparkConfig(vocab_size=199, hidden_size=64, num_attention_heads=4, target_layer_ids=[0, 2],
    ...                       num_target_layers=5, mask_token_id=198)
    >>> config.block_size
    7

    ```
    """

    model_type = "dspark"

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters | dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    attention_scale: float | int | None = None
    attention_k_eq_v: bool = False
    value_norm: bool = False
    sandwich_norms: bool = False
    layer_scalar: bool = False

    block_size: int = 7
    sample_from_anchor: bool = True
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = 36
    mask_token_id: int = 151669

    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_temperatures: list[float] | None = None
    draft_vocab_size: int | None = None

    default_num_assistant_tokens: int | None = None
    default_assistant_confidence_threshold: float | int = 0.5
    default_num_assistant_tokens_schedule: str | None = None

    target_name_or_path: str | None = None
    chat_template_sha256: str | None = None
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_layer_ids is None:
            self.target_layer_ids = [1, 9, 17, 25, 33]
        if self.default_num_assistant_tokens_schedule is None:
            self.default_num_assistant_tokens_schedule = "throughput" if self.enable_confidence_head else "fixed"
        self._check_sizes()
        self._check_target()
        self._check_heads()
        self._check_defaults()
        super().__post_init__(**kwargs)

    @property
    def num_block_positions(self) -> int:
        """Positions of a block in the backbone: the draft positions, preceded by the anchor's if that drafts nothing."""
        return self.block_size + (not self.sample_from_anchor)

    def _check_sizes(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "num_key_value_heads", "head_dim", "block_size", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.num_attention_heads % self.num_key_value_heads:  # type: ignore[operator]  # filled in by now
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be an activation of Transformers, got {self.hidden_act!r}.")
        if self.head_dim % 2:  # type: ignore[operator]  # filled in by now
            raise ValueError(f"`head_dim` must be even for rotary embeddings, got {self.head_dim}.")
        kinds = [name for name, value in (self.rope_parameters or {}).items() if isinstance(value, dict)]
        if kinds:
            raise ValueError(
                f"`rope_parameters` must describe one kind of layer, because all layers of a drafter are alike, got {kinds}; "
                "pass the entry `full_attention`."
            )
        if self.attention_scale is not None and not 0 < self.attention_scale < math.inf:
            raise ValueError(
                f"`attention_scale` must be a positive number, or `None` for `head_dim ** -0.5`, got {self.attention_scale}."
            )

    def _check_target(self) -> None:
        ids = self.target_layer_ids
        if not ids or any(later <= earlier for earlier, later in pairwise(ids)):
            raise ValueError(f"`target_layer_ids` must be a non-empty, strictly increasing list, got {ids}.")
        last = ids[-1] + 1 if self.num_target_layers is None else self.num_target_layers - 1
        if ids[0] < -1 or ids[-1] > last:
            raise ValueError(
                f"`target_layer_ids` {ids} must lie between -1 (the embedding output) and {last - 1}, since "
                f"`num_target_layers` is {self.num_target_layers}."
            )
        if ids[-1] == last:
            raise ValueError(
                f"`target_layer_ids` {ids} taps the last layer ({last}), whose hidden state Transformers returns "
                f"after the final norm; the highest id that can be tapped is {last - 1}."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must lie in [0, vocab_size) = [0, {self.vocab_size}), got {self.mask_token_id}."
            )

    def _check_heads(self) -> None:
        if self.markov_rank < 0:
            raise ValueError(f"`markov_rank` must be at least 0 (0 = no sequential head), got {self.markov_rank}.")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(f"`markov_head_type` must be one of {MARKOV_HEAD_TYPES}, got {self.markov_head_type!r}.")
        if self.markov_rank == 0 and self.markov_head_type != "vanilla":
            raise ValueError(
                f"`markov_head_type={self.markov_head_type!r}` needs `markov_rank > 0`; `markov_rank=0` has no head."
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0:
            raise ValueError(
                "`confidence_head_with_markov=True` needs `markov_rank > 0`; pass `confidence_head_with_markov=False`."
            )
        temperatures = self.confidence_temperatures
        if temperatures is not None:
            if not self.enable_confidence_head:
                raise ValueError("`confidence_temperatures` needs `enable_confidence_head=True`.")
            if len(temperatures) != self.block_size or not all(
                0 < temperature < math.inf for temperature in temperatures
            ):
                raise ValueError(
                    f"`confidence_temperatures` must be {self.block_size} (`block_size`) positive numbers, "
                    f"got {temperatures}."
                )
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` must lie in [1, vocab_size = {self.vocab_size}], got {self.draft_vocab_size}."
            )

    def _check_defaults(self) -> None:
        if self.default_num_assistant_tokens is not None and self.default_num_assistant_tokens < 1:
            raise ValueError(
                f"`default_num_assistant_tokens` must be at least 1, got {self.default_num_assistant_tokens}."
            )
        if not 0 <= self.default_assistant_confidence_threshold <= 1:
            raise ValueError(
                "`default_assistant_confidence_threshold` must lie in [0, 1], got "
                f"{self.default_assistant_confidence_threshold}."
            )
        if self.default_num_assistant_tokens_schedule not in SCHEDULES:
            raise ValueError(
                f"`default_num_assistant_tokens_schedule` must be one of {SCHEDULES}, got "
                f"{self.default_num_assistant_tokens_schedule!r}."
            )


DSparkConfig.register_for_auto_class()

__all__ = ["BACKBONE_TRAITS", "GEMMA4_TRAITS", "MARKOV_HEAD_TYPES", "SCHEDULES", "DSparkConfig"]
