"""The claim of GRPO-RoC put to the test on two CPU cores; see ``rollyard-trainer toy --help``."""
