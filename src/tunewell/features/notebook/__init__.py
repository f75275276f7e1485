"""Write a Colab notebook that trains a config on a GPU."""
