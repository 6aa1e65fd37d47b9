"""What strategies are told: arguments, optimizers, learning-rate schedules."""
