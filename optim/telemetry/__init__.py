"""An optimizer tells this of itself."""
