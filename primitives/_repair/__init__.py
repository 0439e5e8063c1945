"""Right derivatives for torch's own operators, registered with the dispatcher: `repair_torch`."""
