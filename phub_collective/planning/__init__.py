"""`phub plan`: what a rack needs (`bandwidth`), what it costs (`cost`, from `prices`) and how far
it goes (`scale`), before there is one. Pure arithmetic with the paper's formulas."""
