"""A package, so that the children of
`tests.helpers.processes` import it by name."""
