"""Where two block formats differ, on which input and in which step; and which preset a kernel follows."""
