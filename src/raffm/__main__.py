"""`python -m raffm` is `raffm`."""

from raffm.cli.main import main

main()
