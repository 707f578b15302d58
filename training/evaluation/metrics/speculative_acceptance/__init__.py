"""The metric module `speculative_acceptance`, in the file of that name."""
