"""What optimizers, schedules and solvers share: Hessian-vector products, Lanczos, line search, quantisation."""
