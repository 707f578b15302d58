"""Public names of release 0.1 lead to the new ones and say so."""

import importlib
import sys

import pytest

from modeling_dspark import RoundView, RunStatistics


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("accepted_length", "acceptance_length"),
        ("acceptance_by_position", "acceptance_rate_by_position"),
        ("verification_budget", "mean_verified_tokens"),
        ("parked", "plain"),
        ("parked_rounds", "plain_rounds"),
    ],
)
def test_counts(old, new):
    counts = RunStatistics(3)
    counts.add_round(drafted=3, verified=2, accepted=1, new_tokens=2)
    counts.add_round(drafted=0, verified=0, accepted=0, new_tokens=1, plain=True)
    with pytest.warns(FutureWarning, match=f"`RunStatistics.{old}` is now `{new}`"):
        assert getattr(counts, old) == getattr(counts, new)


def test_the_view_of_a_schedule():
    with pytest.warns(FutureWarning, match="`RoundView.round_up` is now `token_bucket`"):
        assert RoundView([], 1, token_bucket=abs).round_up is abs


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("cache_dspark", "model_cache", "DSparkCache"),
        ("costs_dspark", "schedule_costs", "Curve"),
        ("drafting_dspark", "draft_propose", "propose"),
        ("requests_dspark", "engine_request", "Request"),
        ("scheduling_dspark", "schedule_settings", "FixedSchedule"),
        ("target_dspark", "target_binding", "tapped_features"),
        ("verification_dspark", "draft_accept", "accept_greedy"),
    ],
)
def test_documented_modules(old, new, name):
    sys.modules.pop(f"modeling_dspark.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"`modeling_dspark.{old}` is now `modeling_dspark.{new}`"):
        module = importlib.import_module(f"modeling_dspark.{old}")
    assert getattr(module, name) is getattr(importlib.import_module(f"modeling_dspark.{new}"), name)
