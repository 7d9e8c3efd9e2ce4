"""Where a model's arrays live when it is spread over several devices."""
