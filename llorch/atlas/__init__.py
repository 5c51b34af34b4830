"""Compare engines that others wrote with the float64 reference, stage by stage, and name the cause of each error."""
