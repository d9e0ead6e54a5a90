"""Update rules: what one optimizer adds to the house."""
