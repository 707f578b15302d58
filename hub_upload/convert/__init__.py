"""Convert checkpoints between formats."""

from hub_upload.convert.plan import Plan, convert, plan_conversion


__all__ = ["Plan", "convert", "plan_conversion"]
