"""The drafter that training starts from: a given one, or a new one made for the target and its answers."""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from modeling_dspark import DSparkConfig, DSparkModel
from training.data.conversations import Conversation, choose_draft_vocabulary, num_answers_with
from training.run.architectures import ARCHITECTURES
from training.run.initialization import (
    config_for_target,
    default_layer_ids,
    set_draft_vocabulary,
    start_markov_embedding,
    warm_start,
)
from training.run.options import DrafterArguments


logger = logging.get_logger("training.train")


def fresh_config(
    arguments: DrafterArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> DSparkConfig:
    """Configuration of a new drafter.

    Raises:
        ValueError: if the arguments do not fit the target.
    """
    text = target.config.get_text_config()
    ids = arguments.target_layer_ids or default_layer_ids(text.num_hidden_layers, arguments.num_taps)
    return config_for_target(
        target,
        tokenizer,
        arguments.target,
        config_class=ARCHITECTURES[arguments.architecture].config_class,
        num_hidden_layers=arguments.num_draft_layers,
        block_size=arguments.block_size,
        sample_from_anchor=arguments.sample_from_anchor,
        target_layer_ids=ids,
        mask_token_id=arguments.mask_token_id,
        markov_rank=arguments.markov_rank,
        markov_head_type=arguments.markov_head_type,
        enable_confidence_head=arguments.confidence_head,
        confidence_head_with_markov=arguments.markov_rank > 0,
        draft_vocab_size=arguments.draft_vocab_size,
        **arguments.traits(),
    )


def build_drafter(
    arguments: DrafterArguments,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[Conversation],
) -> DSparkModel:
    """A given drafter, uncalibrated, or a new one with its draft vocabulary and warm start."""
    architecture: Any = ARCHITECTURES[arguments.architecture]
    if arguments.drafter is not None:
        logger.warning(f"Continuing `{arguments.drafter}`; arguments that shape a new drafter are not used.")
        drafter = architecture.from_pretrained(arguments.drafter, dtype=torch.float32)
        made_for = drafter.config.target_name_or_path
        if made_for not in (None, arguments.target):
            logger.warning(f"It was made for `{made_for}`; `target` is `{arguments.target}`.")
        if drafter.config.confidence_temperatures is not None:
            logger.warning(
                "Its `confidence_temperatures` belong to its present confidence head: calibrate again after training."
            )
            drafter.config.confidence_temperatures = None
        return drafter
    config = fresh_config(arguments, target, tokenizer)
    if count := num_answers_with(config.mask_token_id, conversations):
        logger.warning(
            f"`mask_token_id`: {count} of {len(conversations)} conversations have token {config.mask_token_id} in an answer. "
            "Choose one that the target never produces."
        )
    drafter = architecture(config)
    if arguments.draft_vocab_size is not None:
        text = target.config.get_text_config()
        eos = text.eos_token_id
        always = [] if eos is None else eos if isinstance(eos, list) else [eos]
        tokens, coverage = choose_draft_vocabulary(conversations, arguments.draft_vocab_size, text.vocab_size, always)
        set_draft_vocabulary(drafter, tokens)
        logger.warning(f"Draft vocabulary: {len(tokens)} tokens cover {coverage:.2%} of the answer tokens.")
    if arguments.init_from_target_layers is not None:
        warm_start(drafter, target, arguments.init_from_target_layers)
        start_markov_embedding(drafter, target)
    return drafter


__all__ = ["build_drafter", "fresh_config"]
