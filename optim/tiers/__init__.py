"""Parameters and gradients on tiers."""
