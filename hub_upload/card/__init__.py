"""The model card, from reports and facts."""
