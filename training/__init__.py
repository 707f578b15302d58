"""Training of DSpark drafters: regenerate answers, train, and (later) calibrate and evaluate."""
