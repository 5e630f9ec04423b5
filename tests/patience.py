"""How long tests wait: none depends on the speed of the machine, which may have plenty of other things to do."""

AT_ONCE_S = 10.0  # for what takes milliseconds on a machine of its own; whatever it is told from takes longer still, mostly 30 s
