"""How far engines that others wrote are from the truth, stage by stage, and why."""
