"""`python -m cp_trainer_glue` is `cp-train`."""

from .cli import main

if __name__ == "__main__":
    main()
