"""What tokens share, from the recipe alone: `structure`, its table and its picture."""
