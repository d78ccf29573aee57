"""The command line's verbs: one file each, named as the verb (`_` for its hyphens).

A verb's module has a docstring, whose first line is its help, `add_arguments(parser)`
for argparse, and `run(args)`, which prints and returns the exit status: 0 fine, 1 a
problem was found. `--json` is added to every verb as `args.json`. All verbs are
imported for the help, so what is slow to import belongs inside `run`.
"""
