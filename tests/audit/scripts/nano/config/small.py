eval_iters = 2
max_iters = 100
