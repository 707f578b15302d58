"""The DSpark drafter: backbone, sequential head and confidence head, with loading and saving.

`forward` is neutral: noise embeddings, context, positions, mask and cache in, hidden states out. The same call
decodes one block and trains many packed blocks; anchors, labels and losses are outside of this file. Last file of the data
path.

Shapes: `R` rows, `C` context positions, `Q` block positions, `L` tapped layers, `D` hidden size, `V` vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from .configuration_dspark import DSparkConfig
from .fused_head import fusable
from .generate_dispatch import install_dispatcher
from .generate_mixin import AssistantMixin
from .model_backbone import DSparkAttention, DSparkDecoderLayer, DSparkRMSNorm, DSparkRotaryEmbedding, attention_bias
from .model_cache import DSparkCache
from .model_heads import ConfidenceHead, MarkovHead
from .model_loading import FILE_ARGUMENTS, load_strictly


@dataclass
class DSparkOutput(ModelOutput):
    """
    Output of the draft backbone.

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(R, Q, D)`): Block hidden states after the final norm.
    """

    last_hidden_state: torch.Tensor | None = None


class HeadStep(NamedTuple):
    """One position through the heads: `logits` `[..., Vd]`, `confidence_logits` `[...]` or `None`, `state` or `None`."""

    logits: torch.Tensor
    confidence_logits: torch.Tensor | None
    state: torch.Tensor | None


class DSparkPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation common to DSpark models."""

    config: DSparkConfig
    config_class = DSparkConfig
    base_model_prefix = "dspark"
    # Copies of modules that are borrowed from the target, and the inverse of `d2t`.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.weight$", r"^lm_head\.weight$", r"^t2d$"]
    # Set by the package to `formats.foreign_arguments`, which a published drafter does not have.
    foreign_arguments: Callable[..., dict[str, Any]] | None = None
    supports_gradient_checkpointing = True
    _no_split_modules = ["DSparkDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        head = getattr(self, "markov_head", None)
        if head is not None and module is head.markov_w2:
            # A zero W2 starts from the plain backbone; W1 alone breaks the symmetry.
            init.zeros_(module.weight)


class DSparkModel(AssistantMixin, DSparkPreTrainedModel):
    """
    A DSpark drafter for one target; pass it as `assistant_model` to the target's `generate`.

    Embedding and LM head are the target's, borrowed at call time. Parameter names are those of the public checkpoints.

    Attributes:
        last_run ([`RunStatistics`], *optional*): Counts of the last `generate` call this drafter assisted.

    Example:

    ```python
    >>> import torch
    >>> from modeling_dspark import DSparkConfig, DSparkModel
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM

    >>> target = Qwen3ForCausalLM(Qwen3Config(vocab_size=199, hidden_size=64, intermediate_size=48, head_dim=16,
    ...     num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2)).eval()
    >>> drafter = DSparkModel(DSparkConfig(vocab_size=199, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
    ...     num_attention_heads=4, target_layer_ids=[0, 2], num_target_layers=5, mask_token_id=198, markov_rank=8)).eval()
    >>> output = target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    >>> output.shape
    torch.Size([1, 7])

    ```
    """

    d2t: torch.Tensor

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        size = config.hidden_size
        target_layer_ids: list[int] = config.target_layer_ids  # type: ignore[assignment]  # filled in by the config
        self.fc = nn.Linear(len(target_layer_ids) * size, size, bias=False)
        self.hidden_norm = DSparkRMSNorm(size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DSparkDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = DSparkRMSNorm(size, eps=config.rms_norm_eps)
        self.rotary_emb = DSparkRotaryEmbedding(config)  # type: ignore[arg-type]  # has the fields of a Qwen3 config
        self.markov_head = MarkovHead(config) if config.markov_rank > 0 else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.post_init()
        install_dispatcher()

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: DSparkCache | None = None,
        context_lengths: list[int] | None = None,
    ) -> DSparkOutput:
        r"""
        Args:
            noise_embeds (`torch.Tensor` of shape `(R, Q, D)`): Embeddings of the block tokens (anchor, masks).
            context_hidden_states (`torch.Tensor` of shape `(R, C, L * D)`): Target features new to the cache.
            position_ids (`torch.LongTensor` of shape `(R, C + Q)`): Absolute positions, context first.
            attention_mask (`torch.Tensor`, *optional*):
                `[R, 1, Q, C + Q]`, boolean (`True` = may be read) or additive, or a flex-attention `BlockMask`; without a
                cache only. `None` lets every block position read everything.
            cache ([`DSparkCache`], *optional*): Context of earlier calls; the caller advances it.
            context_lengths (`list[int]`, *optional*): With a cache: real context positions of each row (default: `C`).

        Returns:
            [`DSparkOutput`]: hidden states of the block positions.
        """
        context = self.hidden_norm(self.fc(context_hidden_states))
        num_rows, num_context = context.shape[:2]
        if cache is not None:
            lengths = [num_context] * num_rows if context_lengths is None else context_lengths
            plan = cache.begin(lengths, num_context, num_block=noise_embeds.shape[1], device=context.device)
            attention_mask = plan.mask
        mask = attention_bias(attention_mask, self.config._attn_implementation, noise_embeds.dtype)
        if isinstance(mask, torch.Tensor) and mask.shape[2] == 1:
            mask = mask.expand(-1, -1, noise_embeds.shape[1], -1)
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        hidden_states = noise_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, context, position_embeddings, mask, cache)
        return DSparkOutput(last_hidden_state=self.norm(hidden_states))

    @torch.no_grad()
    def extend_context(self, features: torch.Tensor, cache: DSparkCache, *, row: int) -> None:
        """Add target features `[C, L * D]` to one row of the context without drafting (a prompt, say)."""
        start, count = cache.lengths[row], features.shape[0]
        cache.reserve(start + count + 1)
        context = self.hidden_norm(self.fc(features[None].to(device=self.device, dtype=self.dtype)))
        positions = torch.arange(start, start + count, device=self.device)[None]
        position_embeddings = self.rotary_emb(context, positions)
        for layer in self.layers:
            attention: DSparkAttention = layer.self_attn  # type: ignore[assignment]  # of a decoder layer
            attention.extend_context(context, position_embeddings, cache=cache, row=row)
        cache.lengths[row] += count

    @fusable
    def head_step(
        self,
        hidden: torch.Tensor,
        base_logits: torch.Tensor,
        previous_tokens: torch.Tensor,
        state: torch.Tensor | None = None,
    ) -> HeadStep:
        """One position through the sequential and the confidence head, in training and in decoding.

        Args:
            hidden (`torch.Tensor` of shape `(..., D)`): Backbone output of the position.
            base_logits (`torch.Tensor` of shape `(..., Vd)`): `U` of the position.
            previous_tokens (`torch.LongTensor` of shape `(...)`): The token before the position, in target ids.
            state (`torch.Tensor` of shape `(..., r)`, *optional*): State of the position before; `None` at position 0.
        """
        previous = None
        if self.markov_head is not None:
            previous = self.markov_head.embed(previous_tokens).to(hidden.dtype)
            latent, state = self.markov_head.step(previous, hidden, state)
            base_logits = base_logits + self.markov_head.bias(latent)
        confidence = None if self.confidence_head is None else self.confidence_head(hidden, previous)
        return HeadStep(base_logits, confidence, state)

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """Target ids `[Vd]` of a reduced draft vocabulary, or `None`."""
        if self.config.draft_vocab_size is None:
            return None
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    @fusable
    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids to target ids: `target = draft + d2t[draft]`."""
        return draft_ids if self.config.draft_vocab_size is None else draft_ids + self.d2t[draft_ids]

    def to_target_logits(self, logits: torch.Tensor, fill: float = -torch.inf) -> torch.Tensor:
        """Logits `[R, Vd]` in the target's vocabulary `[R, V]` and fp32, `fill` at tokens that cannot be drafted."""
        logits = logits.float()
        if self.config.draft_vocab_size is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), fill)
        full[..., self.draft_token_ids] = logits
        return full

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        r"""
        Load a drafter from a folder or the Hub: this project's format, or one of DeepSpec's, speculators',
        SpecForge's, Model-Optimizer's or z-lab's (DFlash), as published.

        Takes the arguments of [`~transformers.PreTrainedModel.from_pretrained`].

        Raises:
            ValueError: if the checkpoint is not a DSpark drafter, or a tensor is missing, unexpected or mis-shaped.
        """
        if (
            cls.foreign_arguments is not None
            and kwargs.get("config") is None
            and pretrained_model_name_or_path is not None
        ):
            where = {name: kwargs[name] for name in FILE_ARGUMENTS if name in kwargs}
            kwargs |= cls.foreign_arguments(cls, pretrained_model_name_or_path, where)
        return load_strictly(super().from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs)


DSparkModel.register_for_auto_class("AutoModel")

__all__ = ["DSparkModel", "DSparkOutput", "DSparkPreTrainedModel", "HeadStep"]
