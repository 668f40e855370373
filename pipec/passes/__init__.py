"""The passes from a spec to a plan, one a file; :mod:`pipec.compiler` runs them in turn."""
