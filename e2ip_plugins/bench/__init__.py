"""``e2ip bench``: the tables of the paper, and of this package, from trainings with the hosts' own commands."""
