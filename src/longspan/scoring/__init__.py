"""What happens to scores between the product and the softmax: functions, biases, dropout."""
