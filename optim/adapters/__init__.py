"""For training loops that others wrote: a module for each package, which imports it; nothing else here needs it."""
