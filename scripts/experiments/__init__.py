"""The paper's tables and figures, one file each; scripts/paper.py is their command line.

An experiment says which cells it needs (`cells.py`); `runner.py` measures them in the rack lab,
`store.py` keeps their rows, and `report.py` makes results/REPORT.md from the rows alone.
"""
