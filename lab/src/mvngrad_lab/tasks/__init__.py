"""What each recipe trains, in a module of the recipe's name, which has a function `task`."""
