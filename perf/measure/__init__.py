"""What is measured, on which machine: the ground under the commands."""
