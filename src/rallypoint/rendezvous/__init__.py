"""How nodes meet: the interface, the registry of back ends, and the back ends themselves."""
