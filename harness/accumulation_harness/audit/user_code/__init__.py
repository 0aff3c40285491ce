"""Somebody's code as the audit calls it: a script, a function or a method, started as its owner does, in a scratch folder."""
