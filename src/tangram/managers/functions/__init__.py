"""Functions: stateless Python callables, such as rewards, in instances that scale from zero to a limit and back.

Imports nothing: the program inside instances is a module of this package.
"""
