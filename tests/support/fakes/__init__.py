"""Stand-ins of tests: hubs, disks, engines, batches, learners and clients, many of which misbehave."""
