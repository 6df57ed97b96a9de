"""One module for each measure; each has `measure(scale) -> Result`."""
