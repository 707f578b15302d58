"""What a drafter brings on sets of prompts, measured and reported."""
