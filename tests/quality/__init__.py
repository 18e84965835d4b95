"""Whether the tools find what they are for: faults planted on purpose, within a stated budget."""
