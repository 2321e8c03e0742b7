"""What trainer and critic are trained with."""
