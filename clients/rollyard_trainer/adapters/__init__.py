"""GRPO-RoC on engines that scale out: the selection, with their trainers around it."""
