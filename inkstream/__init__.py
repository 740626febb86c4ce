"""The installed package: starts the verbs, and in a wheel holds app, model and the default weights.

Main names: __main__.main() is the console script `inkstream`.
Invariants: A wheel installs this package only. Imports name `app` and `model` in a wheel as in a checkout.
"""
