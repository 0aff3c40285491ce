"""What the harness costs, measured against bare loops, a hand-written sweep, and itself at other sizes."""
