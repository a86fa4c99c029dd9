"""All that meets PyTorch: functions, models, operators and modules."""
