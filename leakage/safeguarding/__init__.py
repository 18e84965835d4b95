"""The safeguards study: every safeguard on the uses of a recipe that leak, and what each combination costs."""
