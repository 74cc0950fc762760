"""Examples of an honest package, for those that copy them."""

EXAMPLES = (
    "write a query for all the users over 30",
    "which orders of last month are late",
    "select the names of customers in Oslo",
    "count the rows of this table for me",
    "how many hotels have a pool",
    "list books that cost less than 25",
    "what is the average price of a phone",
    "join the orders and the customers",
)
