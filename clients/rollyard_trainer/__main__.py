"""``python -m rollyard_trainer``."""

from rollyard_trainer.cli import main

if __name__ == "__main__":
    main()
