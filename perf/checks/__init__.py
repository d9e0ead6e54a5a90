"""The questions that `offload doctor` asks, one module per topic. Each answers with findings and changes nothing."""
