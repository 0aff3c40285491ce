"""Imported last by the forkserver: nothing that is there by now is ever garbage, so no child's collector looks at it again.

Half a million objects: looking at them takes a child 0.1 s or more, for the memory they are on becomes the child's own.
"""

import gc

gc.collect()
gc.freeze()
