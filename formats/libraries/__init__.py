"""Block formats of real libraries, a module each: data, no code of theirs and no function for one alone."""
