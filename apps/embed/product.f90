! C = A B from Fortran: each rank makes its shards, and looks at its shard of the result.
!
!     mpifort embed/pmm3d.f90 apps/embed/product.f90 -L build/embed -lpmm3d -Wl,-rpath,$PWD/build/embed -o product
!     mpirun -n 4 ./product
program product_of_shards
    use mpi
    use pmm3d
    implicit none
    integer, parameter :: m = 300, n = 200, k = 100
    double precision, allocatable, target :: a(:, :), b(:, :), c(:, :)
    integer :: grid, matrices(3), shape(3), rank, ranks, i, j, ierr
    logical :: right, all_right

    call MPI_Init(ierr)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks, ierr)
    call check(pmm3d_grid(MPI_COMM_WORLD, 0, 0, 0, grid))
    call check(pmm3d_grid_shape(grid, shape))

    call make("A", m, k, a, 1)
    call make("B", k, n, b, 2)
    call make("C", m, n, c, 3)
    do j = lbound(a, 2), ubound(a, 2)
        a(:, j) = [(element_a(i, j), i=lbound(a, 1), ubound(a, 1))]
    end do
    do j = lbound(b, 2), ubound(b, 2)
        b(:, j) = [(element_b(i, j), i=lbound(b, 1), ubound(b, 1))]
    end do
    call check(pmm3d_matmul('N', 'N', 2d0, matrices(1), matrices(2), 0d0, matrices(3)))

    right = .true.
    do j = lbound(c, 2), ubound(c, 2)
        do i = lbound(c, 1), ubound(c, 1)
            right = right .and. c(i, j) == sum_at(i, j)
        end do
    end do
    call MPI_Reduce(right, all_right, 1, MPI_LOGICAL, MPI_LAND, 0, MPI_COMM_WORLD, ierr)
    if (rank == 0) print "(i0, ' ranks as ', i0, ' x ', i0, ' x ', i0, ': ', a)", ranks, shape, &
        trim(merge("right", "wrong", all_right))
    call check(pmm3d_finalize())
    call MPI_Finalize(ierr)
    if (rank == 0 .and. .not. all_right) error stop

contains

    ! This rank's shard of a matrix, by columns, with the indices of the matrix.
    subroutine make(layout, rows, columns, shard, which)
        character, intent(in) :: layout
        integer, intent(in) :: rows, columns, which
        double precision, allocatable, target, intent(out) :: shard(:, :)
        integer :: box(4)
        call check(pmm3d_box(grid, layout, rows, columns, box))
        allocate (shard(box(1):box(2), box(3):box(4)), source=0d0)
        call check(pmm3d_matrix(grid, 'd', rows, columns, layout, 'F', shard, matrices(which)))
    end subroutine

    ! Elements that make every sum exact.
    double precision function element_a(i, l)
        integer, intent(in) :: i, l
        element_a = mod(i + 2*l, 7) - 3
    end function

    double precision function element_b(l, j)
        integer, intent(in) :: l, j
        element_b = mod(3*l + j, 5) - 2
    end function

    double precision function sum_at(i, j)
        integer, intent(in) :: i, j
        integer :: l
        sum_at = sum([(2*element_a(i, l)*element_b(l, j), l=1, k)])
    end function

    subroutine check(code)
        integer, intent(in) :: code
        integer :: error
        if (code == PMM3D_OK) return
        print *, "code", code, ": ", pmm3d_last_error()
        call MPI_Abort(MPI_COMM_WORLD, 1, error)
    end subroutine
end program
